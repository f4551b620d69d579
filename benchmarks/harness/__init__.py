"""What every measurement needs: processes of contestants, statistics, tables, targets."""
